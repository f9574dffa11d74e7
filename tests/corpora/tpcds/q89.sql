-- Classes' months that differ from a brand's average.
select *
from (
  select
    i_category, i_class, i_brand, s_store_name, s_company_name, d_moy,
    sum(ss_sales_price) as sum_sales,
    avg(sum(ss_sales_price)) over (
      partition by i_category, i_brand, s_store_name, s_company_name
    ) as avg_monthly_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  where d_year in (1999)
    and (
      (i_category in ('Books', 'Electronics', 'Sports')
        and i_class in ('computers', 'stereo', 'football'))
      or (i_category in ('Men', 'Jewelry', 'Women')
        and i_class in ('shirts', 'birdal', 'dresses'))
    )
  group by i_category, i_class, i_brand, s_store_name, s_company_name, d_moy
) as monthly
where case when avg_monthly_sales <> 0
  then abs(sum_sales - avg_monthly_sales) / avg_monthly_sales end > 0.1
order by
  sum_sales - avg_monthly_sales, s_store_name, i_category, i_class, i_brand, s_company_name,
  d_moy, sum_sales, avg_monthly_sales
limit 100
