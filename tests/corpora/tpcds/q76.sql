-- Sales without a reference, in three channels: IS NULL on keys.
select
  channel, col_name, d_year, d_qoy, i_category, count(*) as sales_cnt,
  sum(ext_sales_price) as sales_amt
from (
  select
    'store' as channel, ss_store_sk as col_name, d_year, d_qoy, i_category,
    ss_ext_sales_price as ext_sales_price
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where ss_store_sk is null
  union all
  select 'web', ws_ship_customer_sk, d_year, d_qoy, i_category, ws_ext_sales_price
  from web_sales
  join item on i_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where ws_ship_customer_sk is null
  union all
  select 'catalog', cs_ship_addr_sk, d_year, d_qoy, i_category, cs_ext_sales_price
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  where cs_ship_addr_sk is null
) as every
group by channel, col_name, d_year, d_qoy, i_category
order by channel, col_name, d_year, d_qoy, i_category, sales_cnt, sales_amt
limit 100
