-- Days on which an item's total web sales exceed its store sales: running sums, a full join.
with web as (
  select
    ws_item_sk as item_sk, d_date,
    sum(sum(ws_sales_price)) over (
      partition by ws_item_sk order by d_date
      rows between unbounded preceding and current row
    ) as sales
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  where d_month_seq between 1200 and 1200 + 11 and ws_item_sk is not null
  group by ws_item_sk, d_date
),
stores as (
  select
    ss_item_sk as item_sk, d_date,
    sum(sum(ss_sales_price)) over (
      partition by ss_item_sk order by d_date
      rows between unbounded preceding and current row
    ) as sales
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_month_seq between 1200 and 1200 + 11 and ss_item_sk is not null
  group by ss_item_sk, d_date
),
both_sides as (
  select
    coalesce(web.item_sk, stores.item_sk) as item_sk,
    coalesce(web.d_date, stores.d_date) as d_date,
    web.sales as web_sales,
    stores.sales as store_sales
  from web
  full join stores on stores.item_sk = web.item_sk and stores.d_date = web.d_date
),
running as (
  select
    *,
    max(web_sales) over (
      partition by item_sk order by d_date rows between unbounded preceding and current row
    ) as web_cumulative,
    max(store_sales) over (
      partition by item_sk order by d_date rows between unbounded preceding and current row
    ) as store_cumulative
  from both_sides
)
select item_sk, d_date, web_sales, store_sales, web_cumulative, store_cumulative
from running
where web_cumulative > store_cumulative
order by item_sk, d_date, web_sales, store_sales, web_cumulative, store_cumulative
limit 100
