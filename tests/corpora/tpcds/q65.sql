-- Items that sell a tenth of their store's average: a grouping of a grouping, joined to the first.
with sold as (
  select ss_store_sk, ss_item_sk, sum(ss_sales_price) as revenue
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_month_seq between 1176 and 1176 + 11
  group by ss_store_sk, ss_item_sk
),
average as (
  select ss_store_sk, avg(revenue) as revenue from sold group by ss_store_sk
)
select
  s_store_name, i_item_desc, sold.revenue, i_current_price, i_wholesale_cost, i_brand
from sold
join average on average.ss_store_sk = sold.ss_store_sk
join store on s_store_sk = sold.ss_store_sk
join item on i_item_sk = sold.ss_item_sk
where sold.revenue <= 0.1 * average.revenue
order by s_store_name, i_item_desc, sold.revenue, i_current_price, i_wholesale_cost, i_brand
limit 100
