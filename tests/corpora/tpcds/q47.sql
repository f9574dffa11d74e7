-- Months that differ from the year's average, with the months before and after: windows joined.
with monthly as (
  select
    i_category, i_brand, s_store_name, s_company_name, d_year, d_moy,
    sum(ss_sales_price) as sum_sales,
    avg(sum(ss_sales_price)) over (
      partition by i_category, i_brand, s_store_name, s_company_name, d_year
    ) as avg_monthly_sales,
    rank() over (
      partition by i_category, i_brand, s_store_name, s_company_name order by d_year, d_moy
    ) as rn
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  where d_year = 1999
    or (d_year = 1999 - 1 and d_moy = 12)
    or (d_year = 1999 + 1 and d_moy = 1)
  group by i_category, i_brand, s_store_name, s_company_name, d_year, d_moy
),
beside as (
  select
    m.i_category, m.i_brand, m.s_store_name, m.s_company_name, m.d_year, m.d_moy,
    m.avg_monthly_sales, m.sum_sales, before.sum_sales as psum, after.sum_sales as nsum
  from monthly as m
  join monthly as before
    on before.i_category = m.i_category and before.i_brand = m.i_brand
    and before.s_store_name = m.s_store_name and before.s_company_name = m.s_company_name
    and before.rn = m.rn - 1
  join monthly as after
    on after.i_category = m.i_category and after.i_brand = m.i_brand
    and after.s_store_name = m.s_store_name and after.s_company_name = m.s_company_name
    and after.rn = m.rn + 1
)
select *
from beside
where d_year = 1999 and avg_monthly_sales > 0
  and case when avg_monthly_sales > 0
    then abs(sum_sales - avg_monthly_sales) / avg_monthly_sales end > 0.1
order by
  sum_sales - avg_monthly_sales, s_store_name, i_category, i_brand, s_company_name, d_year, d_moy,
  avg_monthly_sales, sum_sales, psum, nsum
limit 100
