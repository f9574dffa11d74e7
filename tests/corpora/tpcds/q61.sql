-- The promoted share of jewelry: two one-row tables side by side.
select
  promotions, total,
  cast(promotions as decimal(15,4)) / cast(total as decimal(15,4)) * 100 as share
from (
  select sum(ss_ext_sales_price) as promotions
  from store_sales
  join store on s_store_sk = ss_store_sk
  join promotion on p_promo_sk = ss_promo_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join customer on c_customer_sk = ss_customer_sk
  join customer_address on ca_address_sk = c_current_addr_sk
  join item on i_item_sk = ss_item_sk
  where ca_gmt_offset = -5 and i_category = 'Jewelry'
    and (p_channel_dmail = 'Y' or p_channel_email = 'Y' or p_channel_tv = 'Y')
    and s_gmt_offset = -5 and d_year = 1998 and d_moy = 11
) as promoted
cross join (
  select sum(ss_ext_sales_price) as total
  from store_sales
  join store on s_store_sk = ss_store_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join customer on c_customer_sk = ss_customer_sk
  join customer_address on ca_address_sk = c_current_addr_sk
  join item on i_item_sk = ss_item_sk
  where ca_gmt_offset = -5 and i_category = 'Jewelry'
    and s_gmt_offset = -5 and d_year = 1998 and d_moy = 11
) as every
order by promotions, total
limit 100
