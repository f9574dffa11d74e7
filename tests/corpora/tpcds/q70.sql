-- Profit of the five best states with subtotals: IN over a rank of sums, a rank over ROLLUP.
select
  sum(ss_net_profit) as total_sum,
  s_state,
  s_county,
  grouping(s_state) + grouping(s_county) as lochierarchy,
  rank() over (
    partition by
      grouping(s_state) + grouping(s_county), case when grouping(s_county) = 0 then s_state end
    order by sum(ss_net_profit) desc
  ) as rank_within_parent
from store_sales
join date_dim on d_date_sk = ss_sold_date_sk
join store on s_store_sk = ss_store_sk
where d_month_seq between 1200 and 1200 + 11
  and s_state in (
    select state
    from (
      select
        s_state as state,
        rank() over (partition by s_state order by sum(ss_net_profit) desc) as ranking
      from store_sales
      join store on s_store_sk = ss_store_sk
      join date_dim on d_date_sk = ss_sold_date_sk
      where d_month_seq between 1200 and 1200 + 11
      group by s_state
    ) as ranked
    where ranking <= 5
  )
group by rollup (s_state, s_county)
order by
  lochierarchy desc, case when lochierarchy = 0 then s_state end, rank_within_parent, s_state,
  s_county, total_sum
limit 100
