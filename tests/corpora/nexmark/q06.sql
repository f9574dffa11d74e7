-- A seller's average closing price over the last ten auctions: a ROWS frame over first rows.
with closing as (
  select
    a.id,
    a.seller,
    b.price,
    b.dateTime,
    row_number() over (
      partition by a.id order by b.price desc, b.dateTime, b.bidder, b.extra
    ) as place
  from auction as a
  join bid as b on b.auction = a.id and b.dateTime between a.dateTime and a.expires
)
select
  seller,
  id,
  avg(price) over (
    partition by seller order by dateTime, id rows between 10 preceding and current row
  ) as price
from closing
where place = 1
