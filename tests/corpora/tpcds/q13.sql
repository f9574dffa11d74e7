-- Averages over two disjunctions, each of conditions on two tables.
select
  avg(ss_quantity) as quantity,
  avg(ss_ext_sales_price) as price,
  avg(ss_ext_wholesale_cost) as cost,
  sum(ss_ext_wholesale_cost) as whole_cost
from store_sales
join store on s_store_sk = ss_store_sk
join customer_demographics on cd_demo_sk = ss_cdemo_sk
join household_demographics on hd_demo_sk = ss_hdemo_sk
join customer_address on ca_address_sk = ss_addr_sk
join date_dim on d_date_sk = ss_sold_date_sk
where d_year = 2001
  and (
    (cd_marital_status = 'M' and cd_education_status = 'Advanced Degree'
      and ss_sales_price between 100.00 and 150.00 and hd_dep_count = 3)
    or (cd_marital_status = 'S' and cd_education_status = 'College'
      and ss_sales_price between 50.00 and 100.00 and hd_dep_count = 1)
    or (cd_marital_status = 'W' and cd_education_status = '2 yr Degree'
      and ss_sales_price between 150.00 and 200.00 and hd_dep_count = 1)
  )
  and ca_country = 'United States'
  and (
    (ca_state in ('TX', 'OH') and ss_net_profit between 100 and 200)
    or (ca_state in ('OR', 'NM', 'KY') and ss_net_profit between 150 and 300)
    or (ca_state in ('VA', 'TX', 'MS') and ss_net_profit between 50 and 250)
  )
