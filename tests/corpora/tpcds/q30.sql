-- Customers who return on the web far more than their state's average.
with returned as (
  select wr_returning_customer_sk as customer, ca_state as state, sum(wr_return_amt) as total
  from web_returns
  join date_dim on d_date_sk = wr_returned_date_sk
  join customer_address on ca_address_sk = wr_returning_addr_sk
  where d_year = 2002
  group by wr_returning_customer_sk, ca_state
)
select
  c_customer_id, c_salutation, c_first_name, c_last_name, c_preferred_cust_flag, c_birth_day,
  c_birth_month, c_birth_year, c_birth_country, c_login, c_email_address, c_last_review_date_sk,
  r.total
from returned as r
join customer on c_customer_sk = r.customer
join customer_address on ca_address_sk = c_current_addr_sk
where ca_state = 'GA'
  and r.total > (select avg(other.total) * 1.2 from returned as other where other.state = r.state)
order by
  c_customer_id, c_salutation, c_first_name, c_last_name, c_preferred_cust_flag, c_birth_day,
  c_birth_month, c_birth_year, c_birth_country, c_login, c_email_address, c_last_review_date_sk,
  r.total
limit 100
