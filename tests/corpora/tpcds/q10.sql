-- Kinds of customers in some counties: EXISTS, and EXISTS OR EXISTS.
select
  cd_gender, cd_marital_status, cd_education_status, count(*) as cnt1,
  cd_purchase_estimate, count(*) as cnt2, cd_credit_rating, count(*) as cnt3,
  cd_dep_count, count(*) as cnt4, cd_dep_employed_count, count(*) as cnt5,
  cd_dep_college_count, count(*) as cnt6
from customer
join customer_address on ca_address_sk = c_current_addr_sk
join customer_demographics on cd_demo_sk = c_current_cdemo_sk
where ca_county in (
    'Rush County', 'Toole County', 'Jefferson County', 'Dona Ana County', 'La Porte County')
  and exists (
    select 1 from store_sales join date_dim on d_date_sk = ss_sold_date_sk
    where ss_customer_sk = c_customer_sk and d_year = 2002 and d_moy between 1 and 1 + 3
  )
  and (
    exists (
      select 1 from web_sales join date_dim on d_date_sk = ws_sold_date_sk
      where ws_bill_customer_sk = c_customer_sk and d_year = 2002 and d_moy between 1 and 1 + 3
    )
    or exists (
      select 1 from catalog_sales join date_dim on d_date_sk = cs_sold_date_sk
      where cs_ship_customer_sk = c_customer_sk and d_year = 2002 and d_moy between 1 and 1 + 3
    )
  )
group by
  cd_gender, cd_marital_status, cd_education_status, cd_purchase_estimate, cd_credit_rating,
  cd_dep_count, cd_dep_employed_count, cd_dep_college_count
order by
  cd_gender, cd_marital_status, cd_education_status, cd_purchase_estimate, cd_credit_rating,
  cd_dep_count, cd_dep_employed_count, cd_dep_college_count
limit 100
