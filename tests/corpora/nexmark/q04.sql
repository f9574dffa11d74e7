-- The average of the closing prices of a category: an average of maxima over a join on time.
with closing as (
  select a.id, a.category, max(b.price) as final
  from auction as a
  join bid as b on b.auction = a.id and b.dateTime between a.dateTime and a.expires
  group by a.id, a.category
)
select category, avg(final) as final
from closing
group by category
