-- Sales, returns and profit of three channels: outer joins of groups, a cross join, ROLLUP.
with ss as (
  select s_store_sk, sum(ss_ext_sales_price) as sales, sum(ss_net_profit) as profit
  from store_sales
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by s_store_sk
),
sr as (
  select s_store_sk, sum(sr_return_amt) as returns, sum(sr_net_loss) as loss
  from store_returns
  join date_dim on d_date_sk = sr_returned_date_sk
  join store on s_store_sk = sr_store_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by s_store_sk
),
cs as (
  select cs_call_center_sk, sum(cs_ext_sales_price) as sales, sum(cs_net_profit) as profit
  from catalog_sales
  join date_dim on d_date_sk = cs_sold_date_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by cs_call_center_sk
),
cr as (
  select cr_call_center_sk, sum(cr_return_amount) as returns, sum(cr_net_loss) as loss
  from catalog_returns
  join date_dim on d_date_sk = cr_returned_date_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by cr_call_center_sk
),
ws as (
  select wp_web_page_sk, sum(ws_ext_sales_price) as sales, sum(ws_net_profit) as profit
  from web_sales
  join date_dim on d_date_sk = ws_sold_date_sk
  join web_page on wp_web_page_sk = ws_web_page_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by wp_web_page_sk
),
wr as (
  select wp_web_page_sk, sum(wr_return_amt) as returns, sum(wr_net_loss) as loss
  from web_returns
  join date_dim on d_date_sk = wr_returned_date_sk
  join web_page on wp_web_page_sk = wr_web_page_sk
  where d_date between date '2000-08-23' and date '2000-08-23' + interval 30 days
  group by wp_web_page_sk
)
select channel, id, sum(sales) as sales, sum(returns) as returns, sum(profit) as profit
from (
  select
    'store channel' as channel, ss.s_store_sk as id, sales, coalesce(returns, 0) as returns,
    profit - coalesce(loss, 0) as profit
  from ss left join sr on sr.s_store_sk = ss.s_store_sk
  union all
  select 'catalog channel', cs_call_center_sk, sales, returns, profit - loss
  from cs cross join cr
  union all
  select
    'web channel', ws.wp_web_page_sk, sales, coalesce(returns, 0), profit - coalesce(loss, 0)
  from ws left join wr on wr.wp_web_page_sk = ws.wp_web_page_sk
) as every
group by rollup (channel, id)
order by channel, id, sales, returns, profit
limit 100
