-- Such brands in one week and in the same week a year before: scalar subqueries for the weeks.
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
),
this_year as (
  select
    'store' as channel, i_brand_id as brand, i_class_id as class, i_category_id as category,
    sum(ss_quantity * ss_list_price) as sales, count(*) as number_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where ss_item_sk in (select item_sk from cross_items)
    and d_week_seq = (
      select w.d_week_seq from date_dim as w
      where w.d_year = 1999 + 1 and w.d_moy = 12 and w.d_dom = 11)
  group by i_brand_id, i_class_id, i_category_id
  having sum(ss_quantity * ss_list_price) > (select average_sales from average)
),
last_year as (
  select
    'store' as channel, i_brand_id as brand, i_class_id as class, i_category_id as category,
    sum(ss_quantity * ss_list_price) as sales, count(*) as number_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  where ss_item_sk in (select item_sk from cross_items)
    and d_week_seq = (
      select w.d_week_seq from date_dim as w
      where w.d_year = 1999 and w.d_moy = 12 and w.d_dom = 11)
  group by i_brand_id, i_class_id, i_category_id
  having sum(ss_quantity * ss_list_price) > (select average_sales from average)
)
select
  a.channel, a.brand, a.class, a.category, a.sales, a.number_sales,
  b.channel as last_channel, b.brand as last_brand, b.class as last_class,
  b.category as last_category, b.sales as last_sales, b.number_sales as last_number_sales
from this_year as a
join last_year as b on b.brand = a.brand and b.class = a.class and b.category = a.category
order by a.channel, a.brand, a.class, a.category
limit 100
