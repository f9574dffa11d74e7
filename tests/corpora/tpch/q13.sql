-- Customers by their number of orders: counts of the counts of an outer join.
with each as (
  select c_custkey, count(o_orderkey) as c_count
  from customer
  left join orders on o_custkey = c_custkey and o_comment not like '%special%requests%'
  group by c_custkey
)
select c_count, count(*) as custdist
from each
group by c_count
order by custdist desc, c_count desc
