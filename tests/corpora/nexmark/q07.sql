-- The highest bids of each tumbling window.
with highest as (
  select window(dateTime, '10 seconds') as period, max(price) as price
  from bid
  group by window(dateTime, '10 seconds')
)
select b.auction, b.price, b.bidder, b.dateTime, b.extra
from bid as b
join highest as h
  on h.price = b.price and b.dateTime between h.period.end - interval 10 seconds and h.period.end
