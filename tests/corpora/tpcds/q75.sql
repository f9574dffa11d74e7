-- Brands that sell less than the year before: UNION of three outer joins, then joined with itself.
with sold as (
  select
    d_year, i_brand_id, i_class_id, i_category_id, i_manufact_id,
    cs_quantity - coalesce(cr_return_quantity, 0) as cnt,
    cs_ext_sales_price - coalesce(cr_return_amount, 0.0) as amt
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  left join catalog_returns on cr_order_number = cs_order_number and cr_item_sk = cs_item_sk
  where i_category = 'Books'
  union
  select
    d_year, i_brand_id, i_class_id, i_category_id, i_manufact_id,
    ss_quantity - coalesce(sr_return_quantity, 0),
    ss_ext_sales_price - coalesce(sr_return_amt, 0.0)
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  left join store_returns on sr_ticket_number = ss_ticket_number and sr_item_sk = ss_item_sk
  where i_category = 'Books'
  union
  select
    d_year, i_brand_id, i_class_id, i_category_id, i_manufact_id,
    ws_quantity - coalesce(wr_return_quantity, 0),
    ws_ext_sales_price - coalesce(wr_return_amt, 0.0)
  from web_sales
  join item on i_item_sk = ws_item_sk
  join date_dim on d_date_sk = ws_sold_date_sk
  left join web_returns on wr_order_number = ws_order_number and wr_item_sk = ws_item_sk
  where i_category = 'Books'
),
yearly as (
  select
    d_year, i_brand_id, i_class_id, i_category_id, i_manufact_id, sum(cnt) as cnt, sum(amt) as amt
  from sold
  group by d_year, i_brand_id, i_class_id, i_category_id, i_manufact_id
)
select
  prev.d_year as prev_year, curr.d_year as year, curr.i_brand_id, curr.i_class_id,
  curr.i_category_id, curr.i_manufact_id, prev.cnt as prev_yr_cnt, curr.cnt as curr_yr_cnt,
  curr.cnt - prev.cnt as sales_cnt_diff, curr.amt - prev.amt as sales_amt_diff
from yearly as curr
join yearly as prev
  on prev.i_brand_id = curr.i_brand_id and prev.i_class_id = curr.i_class_id
  and prev.i_category_id = curr.i_category_id and prev.i_manufact_id = curr.i_manufact_id
where curr.d_year = 2002 and prev.d_year = 2002 - 1
  and cast(curr.cnt as decimal(17,2)) / cast(prev.cnt as decimal(17,2)) < 0.9
order by
  sales_cnt_diff, sales_amt_diff, curr.i_brand_id, curr.i_class_id, curr.i_category_id,
  curr.i_manufact_id
limit 100
