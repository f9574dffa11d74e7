-- The auctions with the most bids in a hopping window.
with counted as (
  select auction, window(dateTime, '10 seconds', '2 seconds') as period, count(*) as num
  from bid
  group by auction, window(dateTime, '10 seconds', '2 seconds')
),
most as (
  select period, max(num) as num from counted group by period
)
select counted.auction, counted.num, counted.period.start as starttime
from counted
join most on most.period = counted.period and counted.num >= most.num
