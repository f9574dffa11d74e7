-- Margins by category and class with subtotals, ranked within each: a rank over ROLLUP.
select
  sum(ss_net_profit) / sum(ss_ext_sales_price) as gross_margin,
  i_category,
  i_class,
  grouping(i_category) + grouping(i_class) as lochierarchy,
  rank() over (
    partition by
      grouping(i_category) + grouping(i_class), case when grouping(i_class) = 0 then i_category end
    order by sum(ss_net_profit) / sum(ss_ext_sales_price)
  ) as rank_within_parent
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
join store on s_store_sk = ss_store_sk
where d_year = 2001 and s_state in ('TN')
group by rollup (i_category, i_class)
order by
  lochierarchy desc, case when lochierarchy = 0 then i_category end, rank_within_parent,
  i_category, i_class, gross_margin
limit 100
