-- Catalog orders of items with too little stock: eleven tables, inequalities, two outer joins.
select
  i_item_desc, w_warehouse_name, sold.d_week_seq,
  sum(case when p_promo_sk is null then 1 else 0 end) as no_promo,
  sum(case when p_promo_sk is not null then 1 else 0 end) as promo,
  count(*) as total_cnt
from catalog_sales
join inventory on inv_item_sk = cs_item_sk
join warehouse on w_warehouse_sk = inv_warehouse_sk
join item on i_item_sk = cs_item_sk
join customer_demographics on cd_demo_sk = cs_bill_cdemo_sk
join household_demographics on hd_demo_sk = cs_bill_hdemo_sk
join date_dim as sold on sold.d_date_sk = cs_sold_date_sk
join date_dim as stocked on stocked.d_date_sk = inv_date_sk
join date_dim as shipped on shipped.d_date_sk = cs_ship_date_sk
left join promotion on p_promo_sk = cs_promo_sk
left join catalog_returns on cr_item_sk = cs_item_sk and cr_order_number = cs_order_number
where sold.d_week_seq = stocked.d_week_seq
  and inv_quantity_on_hand < cs_quantity
  and shipped.d_date > sold.d_date + interval 5 days
  and hd_buy_potential = '>10000'
  and sold.d_year = 1999
  and cd_marital_status = 'D'
group by i_item_desc, w_warehouse_name, sold.d_week_seq
order by total_cnt desc, i_item_desc, w_warehouse_name, sold.d_week_seq, no_promo, promo
limit 100
