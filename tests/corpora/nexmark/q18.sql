-- A bidder's last bid for each auction: the first row of a partition.
with ranked as (
  select
    *,
    row_number() over (
      partition by bidder, auction order by dateTime desc, price, channel, url, extra
    ) as place
  from bid
)
select auction, bidder, price, channel, url, dateTime, extra
from ranked
where place <= 1
