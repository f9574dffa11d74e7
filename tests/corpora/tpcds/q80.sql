-- Sales less returns of expensive items in three channels: outer joins below sums, ROLLUP.
with store_part as (
  select
    s_store_id as id, sum(ss_ext_sales_price) as sales, sum(coalesce(sr_return_amt, 0)) as returns,
    sum(ss_net_profit - coalesce(sr_net_loss, 0)) as profit
  from store_sales
  left join store_returns on sr_item_sk = ss_item_sk and sr_ticket_number = ss_ticket_number
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  join item on i_item_sk = ss_item_sk
  join promotion on p_promo_sk = ss_promo_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
    and i_current_price > 50 and p_channel_tv = 'N'
  group by s_store_id
),
catalog_part as (
  select
    cp_catalog_page_id as id, sum(cs_ext_sales_price) as sales,
    sum(coalesce(cr_return_amount, 0)) as returns,
    sum(cs_net_profit - coalesce(cr_net_loss, 0)) as profit
  from catalog_sales
  left join catalog_returns on cr_item_sk = cs_item_sk and cr_order_number = cs_order_number
  join date_dim on d_date_sk = cs_sold_date_sk
  join catalog_page on cp_catalog_page_sk = cs_catalog_page_sk
  join item on i_item_sk = cs_item_sk
  join promotion on p_promo_sk = cs_promo_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
    and i_current_price > 50 and p_channel_tv = 'N'
  group by cp_catalog_page_id
),
web_part as (
  select
    web_site_id as id, sum(ws_ext_sales_price) as sales, sum(coalesce(wr_return_amt, 0)) as returns,
    sum(ws_net_profit - coalesce(wr_net_loss, 0)) as profit
  from web_sales
  left join web_returns on wr_item_sk = ws_item_sk and wr_order_number = ws_order_number
  join date_dim on d_date_sk = ws_sold_date_sk
  join web_site on web_site_sk = ws_web_site_sk
  join item on i_item_sk = ws_item_sk
  join promotion on p_promo_sk = ws_promo_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
    and i_current_price > 50 and p_channel_tv = 'N'
  group by web_site_id
)
select channel, id, sum(sales) as sales, sum(returns) as returns, sum(profit) as profit
from (
  select 'store channel' as channel, concat('store', id) as id, sales, returns, profit
  from store_part
  union all
  select 'catalog channel', concat('catalog_page', id), sales, returns, profit from catalog_part
  union all
  select 'web channel', concat('web_site', id), sales, returns, profit from web_part
) as every
group by rollup (channel, id)
order by channel, id, sales, returns, profit
limit 100
