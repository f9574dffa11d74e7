-- The best and the worst items of a store side by side: two ranks over one partition.
with average as (
  select ss_item_sk as item_sk, avg(ss_net_profit) as profit
  from store_sales
  where ss_store_sk = 1
  group by ss_item_sk
  having avg(ss_net_profit) > 0.9 * (
    select avg(ss_net_profit)
    from store_sales
    where ss_store_sk = 1 and ss_addr_sk is null
    group by ss_store_sk
  )
),
worst as (
  select item_sk, rank() over (order by profit) as place from average
),
best as (
  select item_sk, rank() over (order by profit desc) as place from average
)
select worst.place, w.i_product_name as best_performing, b.i_product_name as worst_performing
from worst
join best on best.place = worst.place
join item as w on w.i_item_sk = worst.item_sk
join item as b on b.i_item_sk = best.item_sk
where worst.place < 11 and best.place < 11
order by worst.place, best_performing, worst_performing
limit 100
