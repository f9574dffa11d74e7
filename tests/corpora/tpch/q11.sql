-- Groups whose sum is above a fraction of the whole: a scalar subquery in HAVING.
with held as (
  select ps_partkey, ps_supplycost * ps_availqty as value
  from partsupp
  join supplier on s_suppkey = ps_suppkey
  join nation on n_nationkey = s_nationkey
  where n_name = 'GERMANY'
)
select ps_partkey, sum(value) as value
from held
group by ps_partkey
having sum(value) > (select sum(value) * 0.0001 from held)
order by value desc, ps_partkey
