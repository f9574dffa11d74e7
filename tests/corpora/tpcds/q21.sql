-- Stock before and after a day, where it changed little.
select w_warehouse_name, i_item_id, inv_before, inv_after
from (
  select
    w_warehouse_name, i_item_id,
    sum(case when d_date < date '2000-03-11' then inv_quantity_on_hand else 0 end) as inv_before,
    sum(case when d_date >= date '2000-03-11' then inv_quantity_on_hand else 0 end) as inv_after
  from inventory
  join warehouse on w_warehouse_sk = inv_warehouse_sk
  join item on i_item_sk = inv_item_sk
  join date_dim on d_date_sk = inv_date_sk
  where i_current_price between 0.99 and 1.49
    and d_date between date '2000-03-11' - interval 30 days
      and date '2000-03-11' + interval 30 days
  group by w_warehouse_name, i_item_id
) as stock
where case when inv_before > 0 then inv_after / inv_before end between 2.0 / 3.0 and 3.0 / 2.0
order by w_warehouse_name, i_item_id, inv_before, inv_after
limit 100
