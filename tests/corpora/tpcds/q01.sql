-- Customers who return far more than their store's average: a grouped table against itself.
with returned as (
  select sr_customer_sk as customer, sr_store_sk as store, sum(sr_return_amt) as total
  from store_returns
  join date_dim on d_date_sk = sr_returned_date_sk
  where d_year = 2000
  group by sr_customer_sk, sr_store_sk
)
select c_customer_id
from returned as r
join store on s_store_sk = r.store
join customer on c_customer_sk = r.customer
where s_state = 'TN'
  and r.total > (select avg(other.total) * 1.2 from returned as other where other.store = r.store)
order by c_customer_id
limit 100
