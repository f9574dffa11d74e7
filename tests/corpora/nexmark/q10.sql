-- Bids with the partition of a file log that they belong to: time formatting.
select
  auction, bidder, price, dateTime, extra,
  date_format(dateTime, 'yyyy-MM-dd') as dt,
  date_format(dateTime, 'HH:mm') as hm
from bid
