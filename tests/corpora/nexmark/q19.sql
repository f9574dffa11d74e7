-- The ten highest bids of an auction: the first rows of a partition, with their row numbers.
with ranked as (
  select
    *,
    row_number() over (
      partition by auction order by price desc, dateTime, bidder, channel, url, extra
    ) as rank_number
  from bid
)
select * from ranked where rank_number <= 10
