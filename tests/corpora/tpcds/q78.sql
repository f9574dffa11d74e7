-- Purchases that were not returned, by channel: anti joins written as outer joins, then outer joins.
with ws as (
  select
    d_year as year, ws_item_sk as item, ws_bill_customer_sk as customer, sum(ws_quantity) as qty,
    sum(ws_wholesale_cost) as wc, sum(ws_sales_price) as sp
  from web_sales
  left join web_returns on wr_order_number = ws_order_number and wr_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where wr_order_number is null
  group by d_year, ws_item_sk, ws_bill_customer_sk
),
cs as (
  select
    d_year as year, cs_item_sk as item, cs_bill_customer_sk as customer, sum(cs_quantity) as qty,
    sum(cs_wholesale_cost) as wc, sum(cs_sales_price) as sp
  from catalog_sales
  left join catalog_returns on cr_order_number = cs_order_number and cr_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  where cr_order_number is null
  group by d_year, cs_item_sk, cs_bill_customer_sk
),
ss as (
  select
    d_year as year, ss_item_sk as item, ss_customer_sk as customer, sum(ss_quantity) as qty,
    sum(ss_wholesale_cost) as wc, sum(ss_sales_price) as sp
  from store_sales
  left join store_returns on sr_ticket_number = ss_ticket_number and sr_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where sr_ticket_number is null
  group by d_year, ss_item_sk, ss_customer_sk
)
select
  ss.year, ss.item, ss.customer,
  round(ss.qty / (coalesce(ws.qty, 0) + coalesce(cs.qty, 0)), 2) as ratio,
  ss.qty as store_qty, ss.wc as store_wholesale_cost, ss.sp as store_sales_price,
  coalesce(ws.qty, 0) + coalesce(cs.qty, 0) as other_chan_qty,
  coalesce(ws.wc, 0) + coalesce(cs.wc, 0) as other_chan_wholesale_cost,
  coalesce(ws.sp, 0) + coalesce(cs.sp, 0) as other_chan_sales_price
from ss
left join ws on ws.year = ss.year and ws.item = ss.item and ws.customer = ss.customer
left join cs on cs.year = ss.year and cs.item = ss.item and cs.customer = ss.customer
where (coalesce(ws.qty, 0) > 0 or coalesce(cs.qty, 0) > 0) and ss.year = 2000
order by
  ss.year, ss.item, ss.customer, store_qty desc, store_wholesale_cost desc,
  store_sales_price desc, other_chan_qty, other_chan_wholesale_cost, other_chan_sales_price,
  ratio
limit 100
