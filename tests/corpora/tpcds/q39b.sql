-- The same, with even more variation in the first month.
with spread as (
  select
    w_warehouse_sk as warehouse, i_item_sk as item, d_moy as moy,
    stddev_samp(inv_quantity_on_hand) as stdev, avg(inv_quantity_on_hand) as mean
  from inventory
  join item on i_item_sk = inv_item_sk
  join warehouse on w_warehouse_sk = inv_warehouse_sk
  join date_dim on d_date_sk = inv_date_sk
  where d_year = 2001
  group by w_warehouse_name, w_warehouse_sk, i_item_sk, d_moy
),
wild as (
  select *, case mean when 0 then null else stdev / mean end as cov
  from spread
  where case mean when 0 then 0 else stdev / mean end > 1
)
select
  a.warehouse, a.item, a.moy, a.mean, a.cov,
  b.warehouse as next_warehouse, b.item as next_item, b.moy as next_moy, b.mean as next_mean,
  b.cov as next_cov
from wild as a
join wild as b on b.item = a.item and b.warehouse = a.warehouse
where a.moy = 1 and b.moy = 1 + 1 and a.cov > 1.5
order by a.warehouse, a.item, a.moy, a.mean, a.cov, b.moy, b.mean, b.cov
