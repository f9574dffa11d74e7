-- Averages of an item's sales to a kind of customer.
select
  i_item_id, avg(ss_quantity) as agg1, avg(ss_list_price) as agg2, avg(ss_coupon_amt) as agg3,
  avg(ss_sales_price) as agg4
from store_sales
join customer_demographics on cd_demo_sk = ss_cdemo_sk
join date_dim on d_date_sk = ss_sold_date_sk
join item on i_item_sk = ss_item_sk
join promotion on p_promo_sk = ss_promo_sk
where cd_gender = 'M' and cd_marital_status = 'S' and cd_education_status = 'College'
  and (p_channel_email = 'N' or p_channel_event = 'N')
  and d_year = 2000
group by i_item_id
order by i_item_id, agg1, agg2, agg3, agg4
limit 100
