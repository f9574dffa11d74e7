-- Purchases of frequent items by the best customers: IN over groups, a scalar maximum in HAVING.
with frequent as (
  select substr(i_item_desc, 1, 30) as itemdesc, i_item_sk as item_sk, d_date as solddate
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join item on i_item_sk = ss_item_sk
  where d_year in (2000, 2001, 2002, 2003)
  group by substr(i_item_desc, 1, 30), i_item_sk, d_date
  having count(*) > 4
),
most as (
  select max(csales) as cmax
  from (
    select c_customer_sk, sum(ss_quantity * ss_sales_price) as csales
    from store_sales
    join customer on c_customer_sk = ss_customer_sk
    join date_dim on d_date_sk = ss_sold_date_sk
    where d_year in (2000, 2001, 2002, 2003)
    group by c_customer_sk
  ) as each
),
best as (
  select c_customer_sk
  from store_sales
  join customer on c_customer_sk = ss_customer_sk
  group by c_customer_sk
  having sum(ss_quantity * ss_sales_price) > 95 / 100.0 * (select cmax from most)
)
select sum(sales) as sales
from (
  select cs_quantity * cs_list_price as sales
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_year = 2000 and d_moy = 2
    and cs_item_sk in (select item_sk from frequent)
    and cs_bill_customer_sk in (select c_customer_sk from best)
  union all
  select ws_quantity * ws_list_price
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_year = 2000 and d_moy = 2
    and ws_item_sk in (select item_sk from frequent)
    and ws_bill_customer_sk in (select c_customer_sk from best)
) as every
limit 100
