-- Sales less refunds before and after a day: an outer join below sums.
select
  w_state, i_item_id,
  sum(case when d_date < date '2000-03-11' then cs_sales_price - coalesce(cr_refunded_cash, 0)
    else 0 end) as sales_before,
  sum(case when d_date >= date '2000-03-11' then cs_sales_price - coalesce(cr_refunded_cash, 0)
    else 0 end) as sales_after
from catalog_sales
left join catalog_returns on cr_order_number = cs_order_number and cr_item_sk = cs_item_sk
join warehouse on w_warehouse_sk = cs_warehouse_sk
join item on i_item_sk = cs_item_sk
join date_dim on d_date_sk = cs_sold_date_sk
where i_current_price between 0.99 and 1.49
  and d_date between date '2000-03-11' - interval 30 days and date '2000-03-11' + interval 30 days
group by w_state, i_item_id
order by w_state, i_item_id, sales_before, sales_after
limit 100
