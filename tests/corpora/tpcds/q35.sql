-- Kinds of customers by state: EXISTS, and EXISTS OR EXISTS, with minimum, maximum and average.
select
  ca_state, cd_gender, cd_marital_status,
  cd_dep_count, count(*) as cnt1, min(cd_dep_count) as min1, max(cd_dep_count) as max1,
  avg(cd_dep_count) as avg1,
  cd_dep_employed_count, count(*) as cnt2, min(cd_dep_employed_count) as min2,
  max(cd_dep_employed_count) as max2, avg(cd_dep_employed_count) as avg2,
  cd_dep_college_count, count(*) as cnt3, min(cd_dep_college_count) as min3,
  max(cd_dep_college_count) as max3, avg(cd_dep_college_count) as avg3
from customer
join customer_address on ca_address_sk = c_current_addr_sk
join customer_demographics on cd_demo_sk = c_current_cdemo_sk
where exists (
    select 1 from store_sales join date_dim on d_date_sk = ss_sold_date_sk
    where ss_customer_sk = c_customer_sk and d_year = 2002 and d_qoy < 4
  )
  and (
    exists (
      select 1 from web_sales join date_dim on d_date_sk = ws_sold_date_sk
      where ws_bill_customer_sk = c_customer_sk and d_year = 2002 and d_qoy < 4
    )
    or exists (
      select 1 from catalog_sales join date_dim on d_date_sk = cs_sold_date_sk
      where cs_ship_customer_sk = c_customer_sk and d_year = 2002 and d_qoy < 4
    )
  )
group by
  ca_state, cd_gender, cd_marital_status, cd_dep_count, cd_dep_employed_count, cd_dep_college_count
order by
  ca_state, cd_gender, cd_marital_status, cd_dep_count, cd_dep_employed_count, cd_dep_college_count
limit 100
