-- Web orders of several warehouses with returns: IN over a self join, twice.
with scattered as (
  select a.ws_order_number as number
  from web_sales as a
  join web_sales as b on b.ws_order_number = a.ws_order_number
  where a.ws_warehouse_sk <> b.ws_warehouse_sk
)
select
  count(distinct ws_order_number) as order_count,
  sum(ws_ext_ship_cost) as shipping_cost,
  sum(ws_net_profit) as net_profit
from web_sales
join date_dim on d_date_sk = ws_ship_date_sk
join customer_address on ca_address_sk = ws_ship_addr_sk
join web_site on web_site_sk = ws_web_site_sk
where d_date between date '1999-02-01' and date '1999-02-01' + interval 60 days
  and ca_state = 'IL'
  and web_company_name = 'pri'
  and ws_order_number in (select number from scattered)
  and ws_order_number in (
    select wr_order_number from web_returns join scattered on number = wr_order_number
  )
order by order_count
limit 100
