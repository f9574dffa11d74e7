-- A call center's months that differ from the year's average, with the months before and after.
with monthly as (
  select
    i_category, i_brand, cc_name, d_year, d_moy,
    sum(cs_sales_price) as sum_sales,
    avg(sum(cs_sales_price)) over (
      partition by i_category, i_brand, cc_name, d_year
    ) as avg_monthly_sales,
    rank() over (partition by i_category, i_brand, cc_name order by d_year, d_moy) as rn
  from catalog_sales
  join item on i_item_sk = cs_item_sk
  join date_dim on d_date_sk = cs_sold_date_sk
  join call_center on cc_call_center_sk = cs_call_center_sk
  where d_year = 1999
    or (d_year = 1999 - 1 and d_moy = 12)
    or (d_year = 1999 + 1 and d_moy = 1)
  group by i_category, i_brand, cc_name, d_year, d_moy
),
beside as (
  select
    m.i_category, m.i_brand, m.cc_name, m.d_year, m.d_moy, m.avg_monthly_sales, m.sum_sales,
    before.sum_sales as psum, after.sum_sales as nsum
  from monthly as m
  join monthly as before
    on before.i_category = m.i_category and before.i_brand = m.i_brand
    and before.cc_name = m.cc_name and before.rn = m.rn - 1
  join monthly as after
    on after.i_category = m.i_category and after.i_brand = m.i_brand
    and after.cc_name = m.cc_name and after.rn = m.rn + 1
)
select *
from beside
where d_year = 1999 and avg_monthly_sales > 0
  and case when avg_monthly_sales > 0
    then abs(sum_sales - avg_monthly_sales) / avg_monthly_sales end > 0.1
order by
  sum_sales - avg_monthly_sales, cc_name, i_category, i_brand, d_year, d_moy, avg_monthly_sales,
  sum_sales, psum, nsum
limit 100
