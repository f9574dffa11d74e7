-- A manager's brands by minute at mealtimes: a union of three channels below joins.
select
  i_brand_id as brand_id, i_brand as brand, t_hour, t_minute, sum(ext_price) as ext_price
from (
  select
    ws_ext_sales_price as ext_price, ws_item_sk as sold_item_sk, ws_sold_time_sk as time_sk
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_moy = 11 and d_year = 1999
  union all
  select cs_ext_sales_price, cs_item_sk, cs_sold_time_sk
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_moy = 11 and d_year = 1999
  union all
  select ss_ext_sales_price, ss_item_sk, ss_sold_time_sk
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_moy = 11 and d_year = 1999
) as sold
join item on i_item_sk = sold_item_sk
join time_dim on t_time_sk = time_sk
where i_manager_id = 1 and t_meal_time in ('breakfast', 'dinner')
group by i_brand, i_brand_id, t_hour, t_minute
order by ext_price desc, brand_id, t_hour, t_minute
