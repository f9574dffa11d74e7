-- Customers who return by catalog far more than their state's average.
with returned as (
  select
    cr_returning_customer_sk as customer, ca_state as state, sum(cr_return_amt_inc_tax) as total
  from catalog_returns
  join date_dim on d_date_sk = cr_returned_date_sk
  join customer_address on ca_address_sk = cr_returning_addr_sk
  where d_year = 2000
  group by cr_returning_customer_sk, ca_state
)
select
  c_customer_id, c_salutation, c_first_name, c_last_name, ca_street_number, ca_street_name,
  ca_street_type, ca_suite_number, ca_city, ca_county, ca_state, ca_zip, ca_country,
  ca_gmt_offset, ca_location_type, r.total
from returned as r
join customer on c_customer_sk = r.customer
join customer_address on ca_address_sk = c_current_addr_sk
where ca_state = 'GA'
  and r.total > (select avg(other.total) * 1.2 from returned as other where other.state = r.state)
order by
  c_customer_id, c_salutation, c_first_name, c_last_name, ca_street_number, ca_street_name,
  ca_street_type, ca_suite_number, ca_city, ca_county, ca_state, ca_zip, ca_country,
  ca_gmt_offset, ca_location_type, r.total
limit 100
