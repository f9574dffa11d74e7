-- Bids of a bidder by tumbling window (the specification's is of processing time).
select bidder, count(*) as bid_count, window.start as starttime, window.end as endtime
from bid
group by bidder, window(dateTime, '10 seconds')
