-- Sales, returns and profit of three channels, with subtotals: ROLLUP over a union of unions.
with store_part as (
  select
    s_store_id as id, sum(price) as sales, sum(profit) as profit, sum(amount) as returns,
    sum(loss) as loss
  from (
    select
      ss_store_sk as place, ss_sold_date_sk as day, ss_ext_sales_price as price,
      ss_net_profit as profit, cast(0 as decimal(7,2)) as amount, cast(0 as decimal(7,2)) as loss
    from store_sales
    union all
    select
      sr_store_sk, sr_returned_date_sk, cast(0 as decimal(7,2)), cast(0 as decimal(7,2)),
      sr_return_amt, sr_net_loss
    from store_returns
  ) as moved
  join date_dim on d_date_sk = day
  join store on s_store_sk = place
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 14 days
  group by s_store_id
),
catalog_part as (
  select
    cp_catalog_page_id as id, sum(price) as sales, sum(profit) as profit, sum(amount) as returns,
    sum(loss) as loss
  from (
    select
      cs_catalog_page_sk as place, cs_sold_date_sk as day, cs_ext_sales_price as price,
      cs_net_profit as profit, cast(0 as decimal(7,2)) as amount, cast(0 as decimal(7,2)) as loss
    from catalog_sales
    union all
    select
      cr_catalog_page_sk, cr_returned_date_sk, cast(0 as decimal(7,2)), cast(0 as decimal(7,2)),
      cr_return_amount, cr_net_loss
    from catalog_returns
  ) as moved
  join date_dim on d_date_sk = day
  join catalog_page on cp_catalog_page_sk = place
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 14 days
  group by cp_catalog_page_id
),
web_part as (
  select
    web_site_id as id, sum(price) as sales, sum(profit) as profit, sum(amount) as returns,
    sum(loss) as loss
  from (
    select
      ws_web_site_sk as place, ws_sold_date_sk as day, ws_ext_sales_price as price,
      ws_net_profit as profit, cast(0 as decimal(7,2)) as amount, cast(0 as decimal(7,2)) as loss
    from web_sales
    union all
    select
      ws_web_site_sk, wr_returned_date_sk, cast(0 as decimal(7,2)), cast(0 as decimal(7,2)),
      wr_return_amt, wr_net_loss
    from web_returns
    left join web_sales on ws_item_sk = wr_item_sk and ws_order_number = wr_order_number
  ) as moved
  join date_dim on d_date_sk = day
  join web_site on web_site_sk = place
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 14 days
  group by web_site_id
)
select channel, id, sum(sales) as sales, sum(returns) as returns, sum(profit) as profit
from (
  select
    'store channel' as channel, concat('store', id) as id, sales, returns, profit - loss as profit
  from store_part
  union all
  select 'catalog channel', concat('catalog_page', id), sales, returns, profit - loss
  from catalog_part
  union all
  select 'web channel', concat('web_site', id), sales, returns, profit - loss
  from web_part
) as every
group by rollup (channel, id)
order by channel, id, sales, returns, profit
limit 100
