-- Web orders of several warehouses without returns.
select
  count(distinct ws_order_number) as order_count,
  sum(ws_ext_ship_cost) as shipping_cost,
  sum(ws_net_profit) as net_profit
from web_sales as sale
join date_dim on d_date_sk = ws_ship_date_sk
join customer_address on ca_address_sk = ws_ship_addr_sk
join web_site on web_site_sk = ws_web_site_sk
where d_date between date '1999-02-01' and date '1999-02-01' + interval 60 days
  and ca_state = 'IL'
  and web_company_name = 'pri'
  and exists (
    select 1 from web_sales as other
    where other.ws_order_number = sale.ws_order_number
      and other.ws_warehouse_sk <> sale.ws_warehouse_sk
  )
  and not exists (select 1 from web_returns where wr_order_number = sale.ws_order_number)
order by order_count
limit 100
