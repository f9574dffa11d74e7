-- Items of brands that sell in all channels: INTERSECT, IN, a scalar average in HAVING, ROLLUP.
with brands as (
  select i_brand_id as brand, i_class_id as class, i_category_id as category
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_year between 1999 and 1999 + 2
  intersect
  select i_brand_id, i_class_id, i_category_id
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_year between 1999 and 1999 + 2
  intersect
  select i_brand_id, i_class_id, i_category_id
  from web_sales
  join item on i_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_year between 1999 and 1999 + 2
),
cross_items as (
  select i_item_sk as item_sk
  from item
  join brands on brand = i_brand_id and class = i_class_id and category = i_category_id
),
average as (
  select avg(quantity * price) as average_sales
  from (
    select ss_quantity as quantity, ss_list_price as price
    from store_sales join date_dim on d_date_sk = ss_sold_date_sk
    where d_year between 1999 and 1999 + 2
    union all
    select cs_quantity, cs_list_price
    from catalog_sales join date_dim on d_date_sk = cs_sold_date_sk
    where d_year between 1999 and 1999 + 2
    union all
    select ws_quantity, ws_list_price
    from web_sales join date_dim on d_date_sk = ws_sold_date_sk
    where d_year between 1999 and 1999 + 2
  ) as every
)
select
  channel, i_brand_id, i_class_id, i_category_id, sum(sales) as sales,
  sum(number_sales) as number_sales
from (
  select
    'store' as channel, i_brand_id, i_class_id, i_category_id,
    sum(ss_quantity * ss_list_price) as sales, count(*) as number_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where ss_item_sk in (select item_sk from cross_items) and d_year = 1999 + 2 and d_moy = 11
  group by i_brand_id, i_class_id, i_category_id
  having sum(ss_quantity * ss_list_price) > (select average_sales from average)
  union all
  select
    'catalog', i_brand_id, i_class_id, i_category_id, sum(cs_quantity * cs_list_price), count(*)
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  where cs_item_sk in (select item_sk from cross_items) and d_year = 1999 + 2 and d_moy = 11
  group by i_brand_id, i_class_id, i_category_id
  having sum(cs_quantity * cs_list_price) > (select average_sales from average)
  union all
  select 'web', i_brand_id, i_class_id, i_category_id, sum(ws_quantity * ws_list_price), count(*)
  from web_sales
  join item on i_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  where ws_item_sk in (select item_sk from cross_items) and d_year = 1999 + 2 and d_moy = 11
  group by i_brand_id, i_class_id, i_category_id
  having sum(ws_quantity * ws_list_price) > (select average_sales from average)
) as channels
group by rollup (channel, i_brand_id, i_class_id, i_category_id)
order by channel, i_brand_id, i_class_id, i_category_id, sales, number_sales
limit 100
