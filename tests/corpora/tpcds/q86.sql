-- Web payments by category and class with subtotals, ranked within each.
select
  sum(ws_net_paid) as total_sum,
  i_category,
  i_class,
  grouping(i_category) + grouping(i_class) as lochierarchy,
  rank() over (
    partition by
      grouping(i_category) + grouping(i_class), case when grouping(i_class) = 0 then i_category end
    order by sum(ws_net_paid) desc
  ) as rank_within_parent
from web_sales
join date_dim on d_date_sk = ws_sold_date_sk
join item on i_item_sk = ws_item_sk
where d_month_seq between 1200 and 1200 + 11
group by rollup (i_category, i_class)
order by
  lochierarchy desc, case when lochierarchy = 0 then i_category end, rank_within_parent,
  i_category, i_class, total_sum
limit 100
