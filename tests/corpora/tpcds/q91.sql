-- Losses of call centers from returns by one kind of customers.
select
  cc_call_center_id as call_center, cc_name as call_center_name, cc_manager as manager,
  sum(cr_net_loss) as returns_loss
from call_center
join catalog_returns on cr_call_center_sk = cc_call_center_sk
join date_dim on d_date_sk = cr_returned_date_sk
join customer on c_customer_sk = cr_returning_customer_sk
join customer_address on ca_address_sk = c_current_addr_sk
join customer_demographics on cd_demo_sk = c_current_cdemo_sk
join household_demographics on hd_demo_sk = c_current_hdemo_sk
where d_year = 1998 and d_moy = 11
  and (
    (cd_marital_status = 'M' and cd_education_status = 'Unknown')
    or (cd_marital_status = 'W' and cd_education_status = 'Advanced Degree')
  )
  and hd_buy_potential like 'Unknown%'
  and ca_gmt_offset = -7
group by cc_call_center_id, cc_name, cc_manager, cd_marital_status, cd_education_status
order by returns_loss desc
