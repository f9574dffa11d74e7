-- The cheapest suppliers of a part in a region: a correlated minimum over a join.
select s_acctbal, s_name, n_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
from part
join partsupp on ps_partkey = p_partkey
join supplier on s_suppkey = ps_suppkey
join nation on n_nationkey = s_nationkey
join region on r_regionkey = n_regionkey
where p_size = 15
  and p_type like '%BRASS'
  and r_name = 'EUROPE'
  and ps_supplycost = (
    select min(other.ps_supplycost)
    from partsupp as other
    join supplier as s on s.s_suppkey = other.ps_suppkey
    join nation as n on n.n_nationkey = s.s_nationkey
    join region as r on r.r_regionkey = n.n_regionkey
    where other.ps_partkey = p_partkey and r.r_name = 'EUROPE'
  )
order by s_acctbal desc, n_name, s_name, p_partkey, p_mfgr, s_address, s_phone, s_comment
limit 100
