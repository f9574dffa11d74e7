-- The winning bid of each auction: the first row of a partition of a join.
with ranked as (
  select
    a.*,
    b.auction,
    b.bidder,
    b.price,
    b.dateTime as bid_dateTime,
    b.extra as bid_extra,
    row_number() over (
      partition by a.id order by b.price desc, b.dateTime, b.bidder, b.extra
    ) as place
  from auction as a
  join bid as b on b.auction = a.id and b.dateTime between a.dateTime and a.expires
)
select
  id, itemName, description, initialBid, reserve, dateTime, expires, seller, category, extra,
  auction, bidder, price, bid_dateTime, bid_extra
from ranked
where place = 1
