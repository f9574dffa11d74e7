-- Customers of a city, within an income range, who return items.
select
  c_customer_id as customer_id,
  concat(coalesce(c_last_name, ''), ', ', coalesce(c_first_name, '')) as customername
from customer
join customer_address on ca_address_sk = c_current_addr_sk
join customer_demographics on cd_demo_sk = c_current_cdemo_sk
join household_demographics on hd_demo_sk = c_current_hdemo_sk
join income_band on ib_income_band_sk = hd_income_band_sk
join store_returns on sr_cdemo_sk = cd_demo_sk
where ca_city = 'Edgewood' and ib_lower_bound >= 38128 and ib_upper_bound <= 38128 + 50000
order by customer_id, customername
limit 100
