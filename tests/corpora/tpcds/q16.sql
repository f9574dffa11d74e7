-- Catalog orders of several warehouses without returns: EXISTS with <>, NOT EXISTS, distinct count.
select
  count(distinct cs_order_number) as order_count,
  sum(cs_ext_ship_cost) as shipping_cost,
  sum(cs_net_profit) as net_profit
from catalog_sales as sale
join date_dim on d_date_sk = cs_ship_date_sk
join customer_address on ca_address_sk = cs_ship_addr_sk
join call_center on cc_call_center_sk = cs_call_center_sk
where d_date between date '2002-02-01' and date '2002-02-01' + interval 60 days
  and ca_state = 'GA'
  and cc_county = 'Williamson County'
  and exists (
    select 1 from catalog_sales as other
    where other.cs_order_number = sale.cs_order_number
      and other.cs_warehouse_sk <> sale.cs_warehouse_sk
  )
  and not exists (select 1 from catalog_returns where cr_order_number = sale.cs_order_number)
order by order_count
limit 100
