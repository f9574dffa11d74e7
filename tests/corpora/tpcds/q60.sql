-- A category's items in three channels.
with chosen as (
  select i_item_id from item where i_category in ('Music')
),
stores as (
  select i_item_id, sum(ss_ext_sales_price) as total_sales
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join customer_address on ca_address_sk = ss_addr_sk
  join item on i_item_sk = ss_item_sk
  where i_item_id in (select i_item_id from chosen)
    and d_year = 1998 and d_moy = 9 and ca_gmt_offset = -5
  group by i_item_id
),
catalog as (
  select i_item_id, sum(cs_ext_sales_price) as total_sales
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  join customer_address on ca_address_sk = cs_bill_addr_sk
  join item on i_item_sk = cs_item_sk
  where i_item_id in (select i_item_id from chosen)
    and d_year = 1998 and d_moy = 9 and ca_gmt_offset = -5
  group by i_item_id
),
web as (
  select i_item_id, sum(ws_ext_sales_price) as total_sales
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  join customer_address on ca_address_sk = ws_bill_addr_sk
  join item on i_item_sk = ws_item_sk
  where i_item_id in (select i_item_id from chosen)
    and d_year = 1998 and d_moy = 9 and ca_gmt_offset = -5
  group by i_item_id
)
select i_item_id, sum(total_sales) as total_sales
from (
  select * from stores union all select * from catalog union all select * from web
) as every
group by i_item_id
order by i_item_id, total_sales
limit 100
