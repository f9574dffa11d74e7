-- Customers with money and no orders: NOT EXISTS and a scalar average.
with chosen as (
  select c_custkey, substring(c_phone, 1, 2) as cntrycode, c_acctbal
  from customer
  where substring(c_phone, 1, 2) in ('13', '31', '23', '29', '30', '18', '17')
)
select cntrycode, count(*) as numcust, sum(c_acctbal) as totacctbal
from chosen
where c_acctbal > (select avg(c_acctbal) from chosen where c_acctbal > 0.00)
  and not exists (select 1 from orders where o_custkey = c_custkey)
group by cntrycode
order by cntrycode
