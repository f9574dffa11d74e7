-- Pairs of customer and item in one channel or in both: a full join of groups.
with stores as (
  select ss_customer_sk as customer_sk, ss_item_sk as item_sk
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  where d_month_seq between 1200 and 1200 + 11
  group by ss_customer_sk, ss_item_sk
),
catalog as (
  select cs_bill_customer_sk as customer_sk, cs_item_sk as item_sk
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_month_seq between 1200 and 1200 + 11
  group by cs_bill_customer_sk, cs_item_sk
)
select
  sum(case when stores.customer_sk is not null and catalog.customer_sk is null then 1 else 0 end)
    as store_only,
  sum(case when stores.customer_sk is null and catalog.customer_sk is not null then 1 else 0 end)
    as catalog_only,
  sum(case when stores.customer_sk is not null and catalog.customer_sk is not null
    then 1 else 0 end) as store_and_catalog
from stores
full join catalog
  on catalog.customer_sk = stores.customer_sk and catalog.item_sk = stores.item_sk
limit 100
