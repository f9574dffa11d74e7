-- Foreign-born customers by their spending on pale items, above a share of the average.
with paid as (
  select
    c_last_name, c_first_name, s_store_name, ca_state, s_state, i_color, i_current_price,
    i_manager_id, i_units, i_size, sum(ss_net_paid) as netpaid
  from store_sales
  join store_returns on sr_ticket_number = ss_ticket_number and sr_item_sk = ss_item_sk
  join store on s_store_sk = ss_store_sk
  join item on i_item_sk = ss_item_sk
  join customer on c_customer_sk = ss_customer_sk
  join customer_address on ca_address_sk = c_current_addr_sk and ca_zip = s_zip
  where s_market_id = 8 and c_birth_country <> upper(ca_country)
  group by
    c_last_name, c_first_name, s_store_name, ca_state, s_state, i_color, i_current_price,
    i_manager_id, i_units, i_size
)
select c_last_name, c_first_name, s_store_name, sum(netpaid) as paid
from paid
where i_color = 'pale'
group by c_last_name, c_first_name, s_store_name
having sum(netpaid) > (select 0.05 * avg(netpaid) from paid)
order by c_last_name, c_first_name, s_store_name
