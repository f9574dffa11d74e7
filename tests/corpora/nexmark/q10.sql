-- Bids with the partition that a log of files would keep them in: formats of time.
select
  auction, bidder, price, dateTime, extra,
  date_format(dateTime, 'yyyy-MM-dd') as dt,
  date_format(dateTime, 'HH:mm') as hm
from bid
