-- Averages by item and state with subtotals: GROUPING.
select
  i_item_id, s_state, grouping(s_state) as g_state, avg(ss_quantity) as agg1,
  avg(ss_list_price) as agg2, avg(ss_coupon_amt) as agg3, avg(ss_sales_price) as agg4
from store_sales
join customer_demographics on cd_demo_sk = ss_cdemo_sk
join date_dim on d_date_sk = ss_sold_date_sk
join store on s_store_sk = ss_store_sk
join item on i_item_sk = ss_item_sk
where cd_gender = 'M' and cd_marital_status = 'S' and cd_education_status = 'College'
  and d_year = 2002 and s_state in ('TN')
group by rollup (i_item_id, s_state)
order by i_item_id, s_state, g_state, agg1, agg2, agg3, agg4
limit 100
