-- The best hundred of each category over eight subtotals: a rank above a wide ROLLUP.
select *
from (
  select
    i_category, i_class, i_brand, i_product_name, d_year, d_qoy, d_moy, s_store_id, sumsales,
    rank() over (partition by i_category order by sumsales desc) as rk
  from (
    select
      i_category, i_class, i_brand, i_product_name, d_year, d_qoy, d_moy, s_store_id,
      sum(coalesce(ss_sales_price * ss_quantity, 0)) as sumsales
    from store_sales
    join date_dim on d_date_sk = ss_sold_date_sk
    join store on s_store_sk = ss_store_sk
    join item on i_item_sk = ss_item_sk
    where d_month_seq between 1200 and 1200 + 11
    group by rollup (
      i_category, i_class, i_brand, i_product_name, d_year, d_qoy, d_moy, s_store_id)
  ) as sums
) as ranked
where rk <= 100
order by
  i_category, i_class, i_brand, i_product_name, d_year, d_qoy, d_moy, s_store_id, sumsales, rk
limit 100
