-- People who sell in the window in which they registered: a join of two grouped windows.
with arrivals as (
  select id, name, window(dateTime, '10 seconds') as period
  from person
  group by id, name, window(dateTime, '10 seconds')
),
sellers as (
  select seller, window(dateTime, '10 seconds') as period
  from auction
  group by seller, window(dateTime, '10 seconds')
)
select arrivals.id, arrivals.name, arrivals.period.start as starttime
from arrivals
join sellers on sellers.seller = arrivals.id and sellers.period = arrivals.period
