-- Kinds of customers who buy only in stores: EXISTS and two NOT EXISTS.
select
  cd_gender, cd_marital_status, cd_education_status, count(*) as cnt1,
  cd_purchase_estimate, count(*) as cnt2, cd_credit_rating, count(*) as cnt3
from customer
join customer_address on ca_address_sk = c_current_addr_sk
join customer_demographics on cd_demo_sk = c_current_cdemo_sk
where ca_state in ('KY', 'GA', 'NM')
  and exists (
    select 1 from store_sales join date_dim on d_date_sk = ss_sold_date_sk
    where ss_customer_sk = c_customer_sk and d_year = 2001 and d_moy between 4 and 4 + 2
  )
  and not exists (
    select 1 from web_sales join date_dim on d_date_sk = ws_sold_date_sk
    where ws_bill_customer_sk = c_customer_sk and d_year = 2001 and d_moy between 4 and 4 + 2
  )
  and not exists (
    select 1 from catalog_sales join date_dim on d_date_sk = cs_sold_date_sk
    where cs_ship_customer_sk = c_customer_sk and d_year = 2001 and d_moy between 4 and 4 + 2
  )
group by
  cd_gender, cd_marital_status, cd_education_status, cd_purchase_estimate, cd_credit_rating
order by
  cd_gender, cd_marital_status, cd_education_status, cd_purchase_estimate, cd_credit_rating
limit 100
